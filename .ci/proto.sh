#!/bin/sh
# Generates kvstore/v1 from proto/kvstore/v1/*.proto:  .ci/proto.sh [--check]
#
# The generator is pinned: code from a protobuf 6.x compiler runs on runtimes 6 and 7, and generated gRPC code refuses
# a grpcio older than its generator. grpcio-tools 1.72.1 (protobuf 6.30.0) is the oldest that makes 6.x code, so its
# output runs beside the widest range of versions. It lives in an environment of its own under .cache, because it
# cannot be installed beside protobuf 7. --check writes nothing and fails if kvstore/v1 is not what would be written.
set -eu
cd "$(dirname "$0")/.."
. .ci/python.sh

locked_venv proto "the pinned protobuf generator"

out=.cache/proto/out
rm -rf $out
mkdir -p $out
$venv/bin/python -m grpc_tools.protoc --proto_path=proto \
    --python_out=$out --pyi_out=$out --grpc_python_out=$out proto/kvstore/v1/*.proto
generated=$(cd $out/kvstore/v1 && echo *_pb2.py *_pb2.pyi *_pb2_grpc.py)
if [ "${1:-}" = --check ]; then
    for file in $generated; do
        if ! cmp -s $out/kvstore/v1/$file kvstore/v1/$file; then
            echo "kvstore: kvstore/v1/$file does not come from proto/kvstore/v1: run make proto" >&2
            exit 1
        fi
    done
    echo "kvstore: kvstore/v1 is what proto/kvstore/v1 generates"
else
    mkdir -p kvstore/v1
    [ -f kvstore/v1/__init__.py ] || echo '"""The generated messages and stubs of the gRPC service, version 1."""' >kvstore/v1/__init__.py
    for file in $generated; do
        cp $out/kvstore/v1/$file kvstore/v1/
    done
    echo "kvstore: generated kvstore/v1"
fi
