#!/usr/bin/env bash
# Fetches all that an installation takes into dist/wheels, about 4 GB, for a host without a package index.
# In the repository's folder: examples/deploy/wheels.sh
# On that host, in a virtual environment with the same version of Python:
#   (cd wheels && sha256sum --check SHA256SUMS) && pip install --no-index --find-links wheels suture
set -euo pipefail
cd "$(dirname "$0")/../.."
rm -rf dist/wheels && make dist requirements
python3 -m pip wheel --require-hashes --requirement dist/requirements.txt --wheel-dir dist/wheels # pyhocon has none
cp dist/suture-*.whl dist/wheels
cd dist/wheels && sha256sum -- *.whl > SHA256SUMS
