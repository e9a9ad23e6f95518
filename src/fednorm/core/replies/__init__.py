"""What the server does with replies before it uses them."""
