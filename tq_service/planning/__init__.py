"""Selection of the rows for each claim, based on readiness, group and order.

This package only reads `state`, and uses no third-party package except numpy.
"""
