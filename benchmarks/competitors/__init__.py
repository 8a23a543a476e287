"""kvstore compared with its alternatives: Vineyard, LMCache, Mooncake, Redis, plain files, memcpy.

    python -m benchmarks.competitors --setup      makes an environment for each under .cache/competitors (once)
    python -m benchmarks competitors [--quick]    runs them and prints the ratios

Setting up needs Python 3.11, and redis-server from the system's packages.  A run needs memory for as many prompts as
there are contenders, and two more (``--size-mib`` each).

How it is kept fair:

- Each contender is a child process in a virtual environment of its own, and does what its own fast path does:
  batches, registered memory, threads.
- All have the same memory: one shared mapping, its first half the KV to store, its second half where reads go.  The
  parent writes new content into it before each put, wipes the second half before each read, and compares both after:
  a contender cannot be given a figure for bytes it did not deliver.
- Rounds go from contender to contender, each round starting with the next one, so that other load on the machine hits
  all.  A contender deletes what it stored just before it writes again, so that each finds memory that was just freed:
  in a virtual machine the first touch of memory is slow.  The first round warms up and is not counted.
- A figure is the median over the rounds; a ratio is the median of each round's ratio.
- A contender that cannot be set up, started or verified is listed with its reason, never dropped.
"""
