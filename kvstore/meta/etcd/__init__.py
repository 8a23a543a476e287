"""Metadata in etcd v3, over gRPC channels of our own."""

from kvstore.meta.etcd.client import EtcdEndpoints, EtcdMetadata, EtcdTls, EtcdUser, check_access

__all__ = ["EtcdEndpoints", "EtcdMetadata", "EtcdTls", "EtcdUser", "check_access"]
