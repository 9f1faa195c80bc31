"""Tables: what is known of each row, group and put, in columns that are declared once."""
