"""The mechanistic basis of data dependence and abrupt learning (Reddy, 2024): its figures."""
