"""Files of offline batches: their prompts for a plan, and the same requests in another order, to a file or a server."""

from kvstore.batches.file import RequestFile, Tokenizer, load_tokenizer, read_batch
from kvstore.batches.upload import Results, Sent, Server, send

__all__ = ["RequestFile", "Results", "Sent", "Server", "Tokenizer", "load_tokenizer", "read_batch", "send"]
