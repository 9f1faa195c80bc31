#!/usr/bin/env bash
# Makes tq_service/v1 and tq_service/internal from protos/ with the oldest toolchain we support: stubs made by a newer one do not import under
# an older protobuf, the other way round works. `--check` makes them aside and compares.
set -euo pipefail
cd "$(dirname "$0")/.."
tools=.venv-generate
if ! cmp -s protos/requirements.txt "$tools/requirements.txt"; then
  "${PYTHON:-python3}" -m venv --clear "$tools"
  "$tools/bin/pip" install --quiet --disable-pip-version-check -r protos/requirements.txt
  cp protos/requirements.txt "$tools/requirements.txt"
fi
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
PATH="$PWD/$tools/bin:$PATH" "$tools/bin/python" -m grpc_tools.protoc -I protos \
  --python_out="$out" --grpc_python_out="$out" --mypy_out=quiet:"$out" --mypy_grpc_out=quiet:"$out" \
  protos/tq_service/v1/*.proto protos/tq_service/internal/v1/*.proto
packages=(v1 internal)
for directory in v1 internal internal/v1; do
  echo '"""Generated from protos/ by scripts/generate.sh; not written by hand."""' > "$out/tq_service/$directory/__init__.py"
done
if [ "${1:-}" = --check ]; then
  for package in "${packages[@]}"; do
    diff -r -x __pycache__ "$out/tq_service/$package" "tq_service/$package" ||
      { echo "tq_service/$package is stale: run 'make generate'" >&2; exit 1; }
  done
  # The rules of methods can be read with the oldest protobuf, too.
  "$tools/bin/python" -c 'from tq_service.server.rpc.methods import METHODS
assert METHODS and not [name for name, method in METHODS.items() if not method.roles and not method.is_open]'
else
  for package in "${packages[@]}"; do
    rm -rf "tq_service/$package"
    cp -r "$out/tq_service/$package" tq_service/
  done
fi
