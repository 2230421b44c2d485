"""Planted circuits: `planted_model.planted_circuit` and `planted_competitors` build transformers with known heads.

A task goes in; a `PlantedModel` comes out that solves it by the heads of Agarwal & Sarawagi (2025), Fig. 8, and decoys.
"""
