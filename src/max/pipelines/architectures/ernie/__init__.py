"""ERNIE, of Baidu."""
