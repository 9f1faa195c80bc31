"""What a service and its clients say of themselves: to Prometheus what they count, to people the live page."""
