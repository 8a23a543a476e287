"""The worker: a node served over gRPC. ``worker.py`` is the server, ``service.py`` its calls."""
