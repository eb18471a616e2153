"""OLMo, of the Allen Institute."""
