"""Batches of ``kvstore events`` as the installed vLLM decodes them: its structs pin the format."""

from __future__ import annotations

import subprocess

from tests.engines.vllm.engines import PYTHON
from tests.events.test_wire import EXPECTED

DECODED = """
import sys, msgspec
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch
raw = bytes.fromhex(sys.argv[1])
batch = msgspec.msgpack.decode(raw, type=KVEventBatch)
stored = BlockStored(block_hashes=[2, 3], parent_block_hash=1, token_ids=[1, 2], block_size=1, lora_id=None,
                     medium="STORAGE", lora_name=None)
assert batch.events == [AllBlocksCleared(), BlockRemoved(block_hashes=[1], medium="STORAGE"), stored], batch
assert (batch.ts, batch.data_parallel_rank) == (1.5, 0)
assert msgspec.msgpack.encode(batch) == raw
"""


def test_vllm_decodes_our_batches_and_encodes_them_alike() -> None:
    subprocess.run([PYTHON, "-c", DECODED, EXPECTED], check=True, timeout=300)
