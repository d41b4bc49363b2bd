def write_pages(results): return []
