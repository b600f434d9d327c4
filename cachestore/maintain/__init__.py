"""Check a store again, repair it, collect what nobody needs, look at the machine."""
