#!/usr/bin/env bash
# Fetches all that an installation takes into dist/wheels, about 4 GB, for a host without a package index:
#   examples/deploy/wheels.sh
# There, in a virtual environment with the same Python:
#   pip install --no-index --find-links wheels --require-hashes -r wheels/requirements.txt
#   pip install --no-index --no-deps wheels/suture-*.whl
set -euo pipefail
cd "$(dirname "$0")/../.."
make dist requirements
pip download --require-hashes --only-binary :all: --dest dist/wheels --requirement dist/requirements.txt
cp dist/requirements.txt dist/suture-*.whl dist/wheels
