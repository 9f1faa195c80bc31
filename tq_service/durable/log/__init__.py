"""The log of a service: records in segments, with what is torn cut off and what is damaged named."""
