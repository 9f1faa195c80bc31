"""Bulk transfers, which move the data of puts and gets over separate connections, with one thread per connection."""
