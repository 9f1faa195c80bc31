"""The upper floor: which puts there are, their rows and columns, who may store how much, what was confirmed."""
