"""From raw values to the ids and numbers of a request (`RowBlock`): schema, readers, vocabularies. No torch."""
