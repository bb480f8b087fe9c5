-- Add what a holder used before this store counted, as far as it was not added yet. So it may be sent again, by each gateway, with more.
-- The Python twin is windows.add_earlier_use in gateway/limits.
--
-- KEYS: the hash of the holder. ARGV: the windows as in read.lua; then for each period or slice the number of its window, its own number,
-- and the tokens and the cost that were used in it. In the hash, the field e is `part`, or `all` if the store has counted everything
-- (upgrade.lua). A field `e NAME NUMBER` is what was added to the period with this name and number.
local key, holder = KEYS[1], read_holder(KEYS[1], windows_of(ARGV[1]))
if redis.call('HGET', key, 'e') == 'all' then return 'OK' end

-- Return a period or slice, which is added if it is later than another known one; nothing if it is forgotten.
local function period_to_restore(window, number)
  if window.slice > 0 then
    local slot = number % (SLICES + 1)
    local slice = window.slots[slot]
    if slice and slice.number > number then return nil end
    if not slice or slice.number < number then
      slice = {number = number, tokens = 0, cost = 0}
      window.slots[slot] = slice
    end
    window.changed = slot
    return slice
  end
  if window.current.number == number then return window.current end
  if window.other.number == number then return window.other end
  local added = {number = number, tokens = 0, cost = 0}
  if window.current.number < number then
    if window.current.number > window.other.number then window.other = window.current end
    window.current = added
  elseif window.other.number < number then
    window.other = added
  else
    return nil
  end
  return added
end

for at = 2, #ARGV do
  local words = words_of(ARGV[at])
  local window, number, tokens, cost = holder.windows[tonumber(words[1])], tonumber(words[2]), tonumber(words[3]), tonumber(words[4])
  local field = 'e ' .. window.name .. ' ' .. words[2]
  local known = words_of(redis.call('HGET', key, field) or '0 0')
  local more_tokens, more_cost = math.max(tokens - tonumber(known[1]), 0), math.max(cost - tonumber(known[2]), 0)
  local period = period_to_restore(window, number)
  if period and (more_tokens > 0 or more_cost > 0) then
    period.tokens, period.cost = period.tokens + more_tokens, period.cost + more_cost
    redis.call('HSET', key, field, text_of(tonumber(known[1]) + more_tokens) .. ' ' .. text_of(tonumber(known[2]) + more_cost))
    write_holder(key, holder)
  end
end
write_holder(key, holder)
redis.call('HSET', key, 'e', 'part')
return 'OK'
