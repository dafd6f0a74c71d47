"""Where a server is reached."""

from __future__ import annotations


def http_url(host: str, port: int) -> str:
    """http://host:port, an IPv6 address in brackets."""
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"
