"""Sockets, hosts, and the HTTP that is read from them."""
