"""Names and forms of other versions of the API. Documented modules show them; nothing else imports them."""
