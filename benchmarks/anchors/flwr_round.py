"""Rounds of flwr's simulation whose clients return what they get: `PYTHON flwr_round.py MB ROUNDS CLIENTS`.

It runs in an environment of its own, which `make flwr` makes, and `parts/rounds.py` calls it. Prints the
seconds of each round as JSON: from its messages to the mean of its answers.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.simulation import run_simulation

_LARGEST = 2_000_000  # numbers in a tensor, as in the models of parts/rounds.py

client = ClientApp()
server = ServerApp()
size, rounds, clients = float(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])


@client.train()
def train(message: Any, _: Any) -> Any:
    """Return the arrays of the message without work."""
    return Message(RecordDict({"arrays": message.content["arrays"]}), reply_to=message)


@server.main()
def main(grid: Any, _: Any) -> None:
    """Send the arrays to all clients, wait for the answers and average them, round after round."""
    left = int(size * 1e6 / 4)
    arrays = []
    while left > 0:
        arrays.append(np.ones(min(left, _LARGEST), dtype=np.float32))
        left -= _LARGEST
    while len(nodes := list(grid.get_node_ids())) < clients:
        time.sleep(0.1)
    seconds = []
    for number in range(rounds):
        began = time.perf_counter()
        record = ArrayRecord(arrays)
        messages = [
            Message(
                RecordDict({"arrays": record, "config": ConfigRecord({"round": number})}),
                dst_node_id=node,
                message_type="train",
            )
            for node in nodes
        ]
        answers = [answer.content["arrays"].to_numpy_ndarrays() for answer in grid.send_and_receive(messages)]
        arrays = [np.mean(one, axis=0) for one in zip(*answers, strict=True)]
        seconds.append(time.perf_counter() - began)
    print(json.dumps(seconds), flush=True)


if __name__ == "__main__":
    run_simulation(server, client, clients)
