"""The command line ``kvstore``; one file per command, needing the packages of ``kvstore-llm[server]``."""
