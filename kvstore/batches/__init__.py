"""Files of offline batches: their prompts for a plan, and the same requests written in another order.

``forms`` has the kinds of requests, ``tokenizer`` turns text into tokens, ``file`` reads and writes.
"""

from kvstore.batches.file import Batch, read_batch
from kvstore.batches.tokenizer import Tokenizer, load_tokenizer

__all__ = ["Batch", "Tokenizer", "load_tokenizer", "read_batch"]
