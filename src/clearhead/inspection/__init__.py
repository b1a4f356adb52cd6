"""Looking inside attention: the steps of one call, and who looks at whom."""
