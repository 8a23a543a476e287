"""The dashboard: a read-only page about one cluster, for operators. ``server.py`` serves it, ``views.py`` fills it."""
