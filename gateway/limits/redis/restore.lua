-- Add what a holder used before this store counted, as far as it was not added yet. So it may be sent again, by each gateway, with more.
-- The Python twin is windows.add_earlier_use in gateway/limits.
--
-- KEYS: the hash of the holder. ARGV: the windows as in read.lua; then for each period or slice the number of its window, its own number,
-- and the tokens and the cost that were used in it. In the hash, the field e is `part`, or `all` if the store has counted everything
-- (upgrade.lua). A field `e NAME NUMBER` is what was added to the period with this name and number.
local key, holder = KEYS[1], read_holder(KEYS[1], windows_of(ARGV[1]))
if redis.call('HGET', key, 'e') == 'all' then return 'OK' end

-- Return whether a period or slice is forgotten, because later ones have its place.
local function is_forgotten(window, number)
  if window.slice == 0 then return math.min(window.current.number, window.other.number) > number end
  local slice = window.slots[number % (SLICES + 1)]
  return slice and slice.number > number
end

for at = 2, #ARGV do
  local words = words_of(ARGV[at])
  local window, number, tokens, cost = holder.windows[tonumber(words[1])], tonumber(words[2]), tonumber(words[3]), tonumber(words[4])
  local field = 'e ' .. window.name .. ' ' .. words[2]
  local known = words_of(redis.call('HGET', key, field) or '0 0')
  local more_tokens, more_cost = math.max(tokens - tonumber(known[1]), 0), math.max(cost - tonumber(known[2]), 0)
  if not is_forgotten(window, number) and (more_tokens > 0 or more_cost > 0) then
    add_to_period(window, number, more_tokens, more_cost)
    redis.call('HSET', key, field, text_of(tonumber(known[1]) + more_tokens) .. ' ' .. text_of(tonumber(known[2]) + more_cost))
    write_holder(key, holder)
  end
end
write_holder(key, holder)
redis.call('HSET', key, 'e', 'part')
return 'OK'
