"""Combination weights of heads (``weights``), by quadratic programs over the simplex.

``simplex_qp`` solves all programs together; ``cvxpy_qp`` is the reference solver and the fallback.
"""
