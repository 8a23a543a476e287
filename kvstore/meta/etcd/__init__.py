"""Metadata in etcd v3, over gRPC channels of our own.

A package of a few nouns: ``client`` (the operations), ``members`` (which member answers, and until when), ``watch``,
``faults`` (what an etcd error means), ``wire`` (messages), ``access`` (endpoints, TLS, user).
"""

from kvstore.meta.etcd.client import EtcdEndpoints, EtcdMetadata, EtcdTls, EtcdUser, check_access

__all__ = ["EtcdEndpoints", "EtcdMetadata", "EtcdTls", "EtcdUser", "check_access"]
