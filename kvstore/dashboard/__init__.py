"""The dashboard: a read-only page about one cluster, for operators.

``feed`` (one source, read again and again), the sources (``workers``, ``cluster``, ``rooted``, ``collecting``,
``exploring``), ``history``, ``roster``, ``forest`` and ``attention`` (pure), ``board`` (all sources together),
``documents`` (what the page is told), ``web``, ``door`` and ``serving`` (HTTP), ``static`` (the page).
"""
