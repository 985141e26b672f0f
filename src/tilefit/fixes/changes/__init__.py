"""What a change is: data, and the behaviours that it gives live modules; and how it is taken back."""
