"""Files of offline batches: their prompts for a plan, and the same requests in another order, to a file or a server.

``forms`` has the kinds of requests, ``tokenizer`` turns text into tokens, ``file`` reads and writes, ``server`` is
asked, ``results`` has what it answered, ``sending`` does all of a batch.
"""

from kvstore.batches.file import Batch, Tokenizer, load_tokenizer, read_batch
from kvstore.batches.sending import Results, Sent, Server, send

__all__ = ["Batch", "Results", "Sent", "Server", "Tokenizer", "load_tokenizer", "read_batch", "send"]
