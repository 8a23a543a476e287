"""Metadata in a SQLite file on the root, shared by all processes of one host. No server runs.

A package of a few nouns: ``client`` (the operations), ``connection`` (the thread that owns the file, deadlines, forks),
``store`` (the tables), ``watch``, ``faults`` (what an SQLite error means), ``host`` (file systems and clocks that fit).
"""
