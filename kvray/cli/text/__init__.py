"""What commands print: sentences, tables and units; each module turns plain values into text."""
