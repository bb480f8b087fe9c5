-- Read what holders have used, without a change.
--
-- KEYS: the hash of each holder. ARGV: for each holder the name and the seconds of a slice (0: of the calendar) of each window.
-- Returns a text of numbers: for each holder whether the use from before this store counted was added (restore.lua), the milliseconds
-- until its buckets are full, and for each of its windows the tokens and the cost that are used, and the milliseconds until nothing of it
-- is used.
local reply = {}
for i, key in ipairs(KEYS) do
  local holder = read_holder(key, windows_of(ARGV[i]))
  append(reply, redis.call('HEXISTS', key, 'e'))
  append_counts(reply, holder)
end
return reply_of(reply)
