"""Reset flamepy, so that one process can use several Flames in turn.

This module does not know the stub.
"""

from __future__ import annotations


def reset_client() -> None:
    """Close flamepy's channel, which ends its watchers, and clear all its caches."""
    from flamepy.core import cache
    from flamepy.core.client import ConnectionInstance

    with ConnectionInstance._lock:
        connection, ConnectionInstance._connection = ConnectionInstance._connection, None
        ConnectionInstance._context = None
    if connection is not None:
        connection._channel.close()
        connection.close()
    with cache._client_pool_lock:
        clients = list(cache._client_pool.values())
        cache._client_pool.clear()
    for client in clients:
        client.close()
    with cache._context_cache_lock:
        cache._context_cache = None
    with cache._cache_lock:
        cache._object_cache.clear()
