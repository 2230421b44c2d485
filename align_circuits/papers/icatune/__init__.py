"""The Missing Alignment Link (Agarwal and Sarawagi, 2025): models tuned in context, figures."""
