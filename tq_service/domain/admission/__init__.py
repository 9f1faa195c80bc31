"""Admission: what bounds writes of new samples, and the queue in which they wait for capacity."""
