"""What tries, measures and attacks kvray; nothing but the command line imports it."""
