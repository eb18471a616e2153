"""The server behind ``max serve``: HTTP and tokenizing in one process, the engine in another.

It needs the extra ``serve``; nothing below it imports it.
"""
