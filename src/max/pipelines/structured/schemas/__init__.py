"""JSON Schema: its rules in the forms that the grammar package keeps, and checks of values."""
