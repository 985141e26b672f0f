"""Recurrent layers that keep their weights on chip, and what runs where they cannot."""
