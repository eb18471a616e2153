"""What all op families share: staging of one op, promotion and broadcasting of operands."""
