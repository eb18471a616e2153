"""An engine in a process of its own: the messages, their channel, and the code of both sides."""
