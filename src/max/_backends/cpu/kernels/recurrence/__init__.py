"""Linear recurrences over the tokens of ragged sequences, whose states are updated in place."""
