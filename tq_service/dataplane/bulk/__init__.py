"""Bulk transfers, which send the data of puts and gets over separate connections, with a thread per connection."""
