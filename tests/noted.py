"""What a run says to a person besides its figures."""

from suture.federation.server.server import Server
from suture_results.notes import read_sentences


def noted(server: Server) -> list[str]:
    return read_sentences(server.record.folder).notes
