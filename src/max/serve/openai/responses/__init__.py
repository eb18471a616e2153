"""The Responses API: its bodies, events, tools, and the responses that are kept."""
