"""The upper floor: which puts there are, their rows and columns, the quota, what was confirmed."""
