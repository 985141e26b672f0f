"""LAY: data that lies in memory the wrong way round."""
