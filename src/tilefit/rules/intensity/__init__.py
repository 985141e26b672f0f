"""INT: too little arithmetic for the bytes that are moved."""
